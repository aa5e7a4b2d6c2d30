"""Several time points: segmenting and linking them."""
