-- needs: session
-- ARGV: stream
redis.call('HDEL', base, 'l:' .. ARGV[1])
redis.call('UNLINK', base .. ':e:' .. ARGV[1], base .. ':k:' .. ARGV[1])
return false
