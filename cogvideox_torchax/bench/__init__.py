"""A/B measurements of the backends: `worker` runs one backend in its own process, `ab` all of them, `report`
writes tables and plots."""
