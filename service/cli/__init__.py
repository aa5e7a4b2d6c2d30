"""Commands of `stackseg`: each module defines the arguments of a command and runs it."""
