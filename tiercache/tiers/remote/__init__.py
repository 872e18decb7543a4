"""Remote tiers: chunks on servers that many processes and machines share. `registry.py` lists the types."""
