"""The docs as a site: pages that are written, pages that are generated, put together and built (`make site`)."""
