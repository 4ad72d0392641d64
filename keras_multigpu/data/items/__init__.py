"""Items by their number, such as a Hugging Face `Dataset` or shards of records offer, as a source.

`items.py` says what items have to offer, `item_source.py` makes examples of them in several
threads. `shards.py` finds the records in TFRecord and tar files through an index (`indexing.py`)
that is stored beside them; `tfrecord.py` and `tar.py` know the two formats.
"""
