"""HTTP endpoints: receive, await, answer; they compute nothing."""
