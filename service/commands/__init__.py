"""Commands of `stackseg` that are more than a few lines: each module adds itself to the parser and runs."""
