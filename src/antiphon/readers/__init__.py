"""One reader for each kind of file: bytes in, extracted text out, an InputError for whatever can't be read."""
