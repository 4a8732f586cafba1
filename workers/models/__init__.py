"""Model code that the roles share: packed forward passes, sharding, adapters and weight files."""
