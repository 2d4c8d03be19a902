"""The main program of each py_test in BUILD: runs pytest on the file it is given."""

import sys

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(["-p", "no:cacheprovider", *sys.argv[1:]]))
