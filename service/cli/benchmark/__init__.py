"""What a model takes on the machine at hand: `stackseg bench`. Nothing that serves imports it."""
