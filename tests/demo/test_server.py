"""How the demo runs its server."""

from pathlib import Path

import pytest

from tiercache.demo.server import quickest_dtype


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512_bf16 amx_tile\n", "bfloat16"),
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512f\n", "float32"),
        ("Features\t: fp asimd bf16\n", "bfloat16"),
        ("nothing that we know\n", "float32"),
    ],
)
def test_bfloat16_only_where_the_cpu_multiplies_it(tmp_path: Path, cpuinfo: str, expected: str) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert quickest_dtype(tmp_path / "cpuinfo") == expected
