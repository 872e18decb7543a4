"""What the kernel's node numbers mean: files that it has looked up, and the names by which it may mean them."""

from __future__ import annotations

ROOT = 1


class Node:
    __slots__ = ("inode", "lookups", "names", "number")

    def __init__(self, number: int, inode: int) -> None:
        self.number = number
        self.inode = inode
        self.lookups = 0
        self.names: dict[tuple[int, str], None] = {}
        """(node of the directory, name); several of a file with hard links"""


class Nodes:
    def __init__(self) -> None:
        self._numbered: dict[int, Node] = {ROOT: Node(ROOT, 0)}
        self._named: dict[tuple[int, str], Node] = {}
        self._of_inode: dict[int, Node] = {}
        self._last = ROOT

    def found(self, directory: int, name: str, inode: int) -> Node:
        """`name` was looked up and is this inode; the kernel knows its node once more."""
        node = self._of_inode.get(inode)
        if node is None or (not node.names and node.number != ROOT):
            # A nameless one is another file that had this inode number before.
            self._last += 1
            node = Node(self._last, inode)
            self._numbered[node.number] = self._of_inode[inode] = node
        self._name(node, (directory, name))
        node.lookups += 1
        return node

    def path(self, number: int) -> str | None:
        """None for a file without a name."""
        parts: list[str] = []
        while number != ROOT:
            node = self._numbered[number]
            if not node.names:
                return None
            number, name = next(iter(node.names))
            parts.append(name)
        return "/" + "/".join(reversed(parts))

    def removed(self, directory: int, name: str) -> None:
        node = self._named.pop((directory, name), None)
        if node is not None:
            node.names.pop((directory, name), None)

    def renamed(self, directory: int, name: str, to_directory: int, to_name: str) -> None:
        self.removed(to_directory, to_name)
        node = self._named.get((directory, name))
        if node is not None:
            self.removed(directory, name)
            self._name(node, (to_directory, to_name))

    def forget(self, number: int, lookups: int) -> None:
        """The kernel knows it so many times less."""
        node = self._numbered.get(number)
        if node is None or number == ROOT:
            return
        node.lookups -= lookups
        if node.lookups <= 0:
            del self._numbered[number]
            if self._of_inode.get(node.inode) is node:
                del self._of_inode[node.inode]
            for place in node.names:
                del self._named[place]
            node.names.clear()

    def of_inode(self, inode: int) -> int | None:
        node = self._of_inode.get(inode)
        return None if node is None else node.number

    def _name(self, node: Node, place: tuple[int, str]) -> None:
        before = self._named.get(place)
        if before is not node:
            if before is not None:
                before.names.pop(place, None)
            self._named[place] = node
            node.names[place] = None
