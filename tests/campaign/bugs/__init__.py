"""Workers with one bug each: what the campaign must find. Each module is a `--worker`."""
