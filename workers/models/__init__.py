"""Model code that all training roles use: packed forward passes, sharding, adapters and files of weights."""
