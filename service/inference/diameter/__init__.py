"""Object diameter and confidence."""
