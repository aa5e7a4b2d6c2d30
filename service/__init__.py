"""StackSeg: 3D microscopy stacks in, label stacks out, over HTTP."""

import os

# Layers of large windows are tens of MiB of fresh memory each, and the system hands that out page by page, which takes
# as long as computing them. torch asks for large pages where this says so when it first allocates.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
