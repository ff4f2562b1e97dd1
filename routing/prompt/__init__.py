"""Request bodies to prompts: parsing, the canonical form, hashes, structure, and small rewrites of a body."""
