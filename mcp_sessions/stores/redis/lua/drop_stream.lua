-- needs: session
-- ARGV: stream
if ARGV[1] ~= 'events' then
    redis.call('HDEL', base, 'l:' .. ARGV[1])
    redis.call('ZREM', base .. ':r', ARGV[1])
    redis.call('UNLINK', base .. ':e:' .. ARGV[1], base .. ':k:' .. ARGV[1])
end
return false
