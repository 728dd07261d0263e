"""`antiphon schema`: the wire protocols as a document."""
