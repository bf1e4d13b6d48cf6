"""The dropout mask's generator, against the vectors that its authors publish (Random123, kat_vectors)."""

import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[1] / "csrc"

PROGRAM = """
#include <cstdio>
#include <cstdlib>
#include "philox.h"

int main(int, char** arguments) {  // seed, offset, counter
    const auto number = [&](int i) { return std::strtoull(arguments[i], nullptr, 16); };
    uint32_t word[4];
    prores::philox(number(1), number(2), number(3), word);
    std::printf("%08x %08x %08x %08x", word[0], word[1], word[2], word[3]);
}
"""

# The counter's four words are {counter, offset}, low half first; the key is the seed.
VECTORS = {
    ("0", "0", "0"): "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ("ffffffffffffffff",) * 3: "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ("299f31d0a4093822", "0370734413198a2e", "85a308d3243f6a88"): "d16cfe09 94fdcceb 5001e420 24126ea1",
}


@pytest.fixture(scope="module")
def philox(tmp_path_factory):
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    folder = tmp_path_factory.mktemp("philox")
    (folder / "philox.cpp").write_text(PROGRAM)
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}"]
    subprocess.run(["g++", *flags, folder / "philox.cpp", "-o", folder / "philox"], check=True)
    return folder / "philox"


@pytest.mark.parametrize("numbers", VECTORS, ids=["zeros", "ones", "pi"])
def test_philox_gives_the_published_numbers(philox, numbers):
    assert subprocess.run([philox, *numbers], capture_output=True, text=True).stdout == VECTORS[numbers]
