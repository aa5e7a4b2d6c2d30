"""Commands of `stackseg`: each module adds its arguments to the parser and runs."""
