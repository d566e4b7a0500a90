"""The stages of `pipeline.run`, one file each: data in, data out, files through the workspace. No stage prints."""
