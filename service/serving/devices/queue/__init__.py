"""The job queue of a device: scheduling, threads and duration estimates."""
