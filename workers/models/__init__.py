"""What the roles compute with: packed forward passes, sharding, adapters, and files of weights."""
