"""Basic modules of `rltrain`, for example for errors, storage and secrets.

Every other subpackage of `rltrain` may import `rltrain.base`, but `rltrain.base` imports no other subpackage.
"""
