"""Steps that people publish; `table.py` lists them."""
