"""What one gateway of many workers has room for: measured (`measure`), and reckoned (`model`)."""
