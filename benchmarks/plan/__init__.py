"""What programs would take on chips that are not there: memory, work, communication, and times on TPUs."""
