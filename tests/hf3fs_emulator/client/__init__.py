"""`hf3fs_py_usrbio` and `hf3fs_fuse.io` in pure Python: the real modules' names, semantics and traps."""
