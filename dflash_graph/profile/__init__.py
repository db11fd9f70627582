"""profile: the document that says what a start-up built, and what reads it."""
