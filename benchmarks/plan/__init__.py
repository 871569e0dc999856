"""Programs on chips that are not there: their memory, work and communication, and times on TPUs."""
