# Type checkers bundle stubs of TensorFlow that lack much of it: here all of it counts
# as unknown.
from typing import Any

def __getattr__(name: str) -> Any: ...
