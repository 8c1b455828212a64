"""Figures of the report page as inline SVG."""
