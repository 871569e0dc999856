"""A/B measurements: `worker` runs one backend in its own process, `ab` all of them, `report` draws."""
