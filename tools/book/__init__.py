"""The docs as a book: pages that are written, pages that are generated, put together and built (`make site`)."""
