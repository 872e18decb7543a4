"""Remote tiers: chunks on servers that many processes and machines share. `registry.py` says which there are."""
