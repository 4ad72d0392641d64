"""Examples that are kept decoded.

cached_source ───> memory            shared by the processes of a machine
└──> folder, files     on disk, across runs
filling            how either is filled, by whoever comes first
"""
