"""Modules that all other folders may import and that import no other folder: errors, storage, secrets, threads."""
