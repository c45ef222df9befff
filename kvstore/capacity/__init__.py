"""Space: how much a namespace may take, what goes when it takes more, and when objects were last used."""
