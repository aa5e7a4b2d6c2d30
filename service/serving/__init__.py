"""Request processing: queues, devices, loaded models, jobs, result files and storage."""
