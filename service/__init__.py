"""StackSeg: segmentation of 3D microscopy stacks over HTTP."""

import os

# The layers of large windows allocate tens of MiB each. With small memory pages, page faults take as long as the
# computation. torch allocates large pages if this variable is set before its first allocation.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
