"""Basic modules, such as errors, storage and secrets. Every folder of the package may import the basic modules, but the
basic modules import no other folder.
"""
