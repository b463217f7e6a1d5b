"""The documentation site: pages of the repository, the reference made of the code, and Zensical that draws them."""
