"""Objects as star-convex polyhedra: candidates, non-maximum suppression and rendering."""
