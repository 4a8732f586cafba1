"""What all other folders may use and that knows nothing of them: errors, storage, secrets, threads."""
