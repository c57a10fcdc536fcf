-- needs: session
-- ARGV: now
local ends, idle = unpack(redis.call('HMGET', base, 'ends', 'idle'))
local now = tonumber(ARGV[1])
if ends and now < seconds(ends) then
    move_deadline(now, tonumber(idle), seconds(ends))
end
return false
