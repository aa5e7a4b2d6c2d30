"""StackSeg: 3D microscopy stacks in, label stacks out, over HTTP."""
