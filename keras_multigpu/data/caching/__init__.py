"""Examples that are kept decoded.

cached_source ───> memory            shared by the processes of a machine
└──> folder, files     on disk, across runs; open_files and rows are what is read
filling            how either is filled
"""
