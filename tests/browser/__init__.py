"""Headless Chromium, and pages that it opens."""
