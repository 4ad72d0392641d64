"""From the bytes of an image file to pixels.

header    size and format, without decoding
decoder   size, colors, cropping
backends  what decodes each kind
"""
