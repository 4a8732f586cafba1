"""Basic modules, such as errors, storage and secrets: every folder of the package may import them, and they import no
other folder.
"""
