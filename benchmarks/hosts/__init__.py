"""Several hosts behind slow links beside one host, on one Linux machine."""
