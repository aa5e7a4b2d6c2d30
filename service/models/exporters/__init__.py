"""Export models as packages and files that other programs can run."""
