"""Basics that all other folders may import and that import none of them: errors, storage, secrets, threads."""
